"""Arguments of an op, checked and put into canonical form."""
