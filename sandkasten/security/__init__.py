"""`sandkasten security`: findings about an installation (`posture`) and attacks on it (`attacks`, `probes`).

Attempts in `probes` run inside of a session and import the standard library alone; those in `attacks` run outside.
Imports `app` and below; the command line imports it. Begin with `campaign.py`.
"""
