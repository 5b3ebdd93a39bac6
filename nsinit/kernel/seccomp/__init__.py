"""The system call filter of sandboxes.

`table.py` has the numbers of the calls, `profiles.py` the policy, `compile.py` makes BPF of both. A profile of the
operator's own is read in `profile.py` and never falls below a floor. Imports `kernel`; `wire` and
every package above import it. Begin with `profiles.py`.
"""
