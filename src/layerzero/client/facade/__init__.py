"""What users touch: the functions that `layerzero` exports."""
