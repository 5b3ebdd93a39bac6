"""The system call filter: which calls a sandbox may make. `table` has the numbers, `profiles` the policy."""
