"""How messages travel: codec, numbered and checksummed frames, and clusters of stages in this process or in others."""
