"""Fields, faults, usage and log probabilities that all APIs share."""
