"""The exchange of one training step over all buckets, from gradients to averaged results."""
