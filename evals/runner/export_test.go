package runner

// PauseAfter exports pauseAfter for tests.
var PauseAfter = pauseAfter
