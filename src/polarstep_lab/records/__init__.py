"""What runs leave behind, in directories and in record files, and where they took place."""

from polarstep_lab.records.lines import RECORDS, add, flat, read, write

__all__ = ["RECORDS", "add", "flat", "read", "write"]
