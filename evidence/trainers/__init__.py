"""Who trains: one trainer for each framework, with the same members, and what they share."""
