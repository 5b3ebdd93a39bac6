"""The client verbs of the real command, on pipes and on pseudo-terminals, against one daemon for each file of tests."""
