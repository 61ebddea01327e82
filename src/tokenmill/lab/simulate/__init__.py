"""What a step log tells: its arrivals under other policies, on a clock of their own, and its exports."""
