"""What the user asks for, and the formulas of slopes and frequencies."""
