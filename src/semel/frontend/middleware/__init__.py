"""What every request passes before its route. Plain ASGI."""
