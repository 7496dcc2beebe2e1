package postgres

import "github.com/jackc/pgx/v5"

// TextsMost is how many texts a connection remembers.
const TextsMost = textsMost

// Texts is how many it has.
func Texts(conn *pgx.Conn) int { return len(textsOf(conn)) }
