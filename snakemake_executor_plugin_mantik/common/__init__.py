"""What every room may use: errors, locks, the state directory, amounts for people."""
