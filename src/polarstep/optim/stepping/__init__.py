"""The step: which matrices go through a polar map together, and how they are read and written."""
