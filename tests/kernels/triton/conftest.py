import os

# Decided before a kernel is first imported: its decorator asks once.
os.environ.setdefault("TRITON_INTERPRET", "1")
