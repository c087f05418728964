"""Folders of compilers' caches: what lies in them is loaded as code, so it is sealed, checked and carried here."""
