"""The commands: flags in, exit status out. The only place that reads flags and environment variables."""
