"""HTTP parts that a frontend and a worker's admin address share."""
