"""What every room of the runtime may use, and what uses none of them."""
