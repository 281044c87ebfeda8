"""What users did, as it arrives."""
