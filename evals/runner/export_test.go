package runner

// For tests.
var PauseAfter = pauseAfter
