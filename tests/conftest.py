"""Makes `rig`, which lies beside this file, importable from every test folder."""
