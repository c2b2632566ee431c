"""Around the step of the user's optimizer: who takes it, and what became of it."""
