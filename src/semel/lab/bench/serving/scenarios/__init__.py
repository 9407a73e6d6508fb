"""The scenarios of `semel bench serve`."""
