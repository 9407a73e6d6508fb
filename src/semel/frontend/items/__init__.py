"""The items that clients send or name, and the tenants that own them."""
