"""What moves the log: driver loop, stage loop, transports, supervision, client. Reaches compute only through the `Executor` protocol."""
