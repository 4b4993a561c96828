"""The simulator's parts: the oracle model, scripted models, transcripts, mutants. They run the real core, driver and stage loops."""
