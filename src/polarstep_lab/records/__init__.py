"""What runs leave behind, in directories and in archives, and where they took place."""
