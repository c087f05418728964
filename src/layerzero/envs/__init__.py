"""Backend environments: a manifest and a lock become a private venv, staged worker code and a probed verdict."""
