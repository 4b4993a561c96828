"""The reference backend, in torch: each op's body here is its meaning, with input generator and tolerance beside it (`table`)."""
