"""`make bench-full`: every row of the benchmark, peers in the same run, a dated report with plots.

`sampling` (samples, intervals, load generators) < `peers` (other runtimes) < `sections` (what is measured) < `report`
(JSON, Markdown, SVG). Begin with `sections.py`.
"""
