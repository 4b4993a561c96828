"""What an engine says of itself to monitoring. Reads counts that it is given; knows no engine, and nothing here is needed to run one."""
