"""The middleware that every request passes before its route. Plain ASGI."""
