package postgres

import "fmt"

// StaleError reports a change that did not take place, because what it is about is not at the revision that it is
// based on.
type StaleError struct {
	What, Name    string // such as objective, and its name
	Read, Current int    // the revision that the change is based on, and the one that is there
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("%s %.60q is at revision %d and not at %d: it was changed since; nothing was done, look at it again", e.What, e.Name, e.Current, e.Read)
}

// AtRevision is a [StaleError] when a row is at another revision than a change is based on. 0 for read: on none.
func AtRevision(what, name string, read, current int) error {
	if read == 0 || read == current {
		return nil
	}
	return &StaleError{what, name, read, current}
}
