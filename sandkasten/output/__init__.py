"""Output and records of runs, kept outside of the sandboxes: in bounded memory, on bounded disk.

`records` (values and their JSON) < `disk` (files of a session) < `blocks` (what is kept) < `log` (one run's output) <
`store` (all of them; who gives way). Imports `model` and `config`; `actors` and the command line import it. Begin with
`store.py`.
"""
