"""The clients, on asyncio, on trio and in threads."""
