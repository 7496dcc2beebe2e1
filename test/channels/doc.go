// Package channels tests channels through the program: with real processes, a real PostgreSQL, and fakes of the
// providers. Real clients of these providers test the fakes.
package channels
