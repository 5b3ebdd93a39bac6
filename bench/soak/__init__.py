"""`make soak`: many cycles, many sessions, random kills and bad neighbours; then nothing may be left or lost."""
