"""Values and protocols that every room shares. Imports nothing but the standard library."""
