"""`zyfa bench`: times of ZYFA's kernels and of the peers found on the machine, and of served prompts."""
