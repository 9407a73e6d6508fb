"""Cells: several whole fleets behind one balancer, each with its own tenants."""
