"""`lz dashboard`: a page that shows what a broker does, live: docs/dashboard.md. Extra `dashboard`."""
