"""The system call filter: numbers (`table.py`), policy (`profiles.py`), the compiler to BPF (`compile.py`)."""
