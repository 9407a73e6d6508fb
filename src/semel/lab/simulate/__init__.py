"""`semel simulate`: a fleet that is not there, by the shipped decisions or by the whole code, under a virtual clock."""
