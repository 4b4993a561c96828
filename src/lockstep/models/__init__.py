"""Families of models: a config becomes a spec, a spec becomes the program of a stage and the sources of its weights. Names no backend."""
