"""What the tests of the tick engine share: random schedules, and the real cron on a virtual clock."""
