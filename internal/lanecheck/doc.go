//go:build unix

// Package lanecheck proves that lanes are linearizable. There is nothing here to import.
package lanecheck
