"""What is done to a step's gradients before they are compressed."""
