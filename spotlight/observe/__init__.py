"""What a run tells: journal, metrics, status, report."""
