"""Every measured claim of the README as a command."""
