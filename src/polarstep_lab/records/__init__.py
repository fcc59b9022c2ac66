"""What runs leave behind, in directories and in record files, and where they took place."""

from polarstep_lab.records.archive import add, flat, read, write

__all__ = ["add", "flat", "read", "write"]
