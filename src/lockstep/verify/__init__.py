"""`lockstep verify`: runs one set of requests in many ways on the user's own model and machine, and compares tokens and log probabilities bit for
bit.

cells      the ways to run, as a covering array
workload   the requests, and the proof that they would notice
script     one run: who is submitted, held back and aborted when
dry_run    a run on known tokens instead of a model, to choose a pool that forces preemption
counters   what a cell must have done to count
matrix     all of it together
report     as a table, as JSON
"""
