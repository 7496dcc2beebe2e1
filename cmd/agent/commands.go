package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// commands lists what the program can do, in the order in which help shows it.
func (c *cli) commands() []*cobra.Command {
	return []*cobra.Command{
		c.devCommand(),
		c.initCommand(),
		c.demoCommand(),
		c.serveCommand(),
		c.migrateCommand(),
		c.applyCommand(),
		c.agentsCommand(),
		c.modelsCommand(),
		c.heartbeatCommand(),
		c.pauseCommand(),
		c.resumeCommand(),
		c.operateCommand(),
		c.chatCommand(),
		c.threadsCommand(),
		c.traceCommand(),
		c.whyCommand(),
		c.activityCommand(),
		c.lanesCommand(),
		c.executionsCommand(),
		c.flowsCommand(),
		c.requestsCommand(),
		c.documentsCommand(),
		c.skillsCommand(),
		c.selfhealCommand(),
		c.approvalsCommand(),
		c.objectivesCommand(),
		c.automationsCommand(),
		c.memoryCommand(),
		c.webhooksCommand(),
		c.retentionCommand(),
		c.mcpCommand(),
		c.doctorCommand(),
		c.healthcheckCommand(),
		c.versionCommand(),
	}
}

// group is a command that only has others below it.
func group(use, short string, below ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short,
		Args: func(cmd *cobra.Command, got []string) error {
			if len(got) > 0 {
				return unknown(cmd.CommandPath()+" "+got[0], got[0], cmd)
			}
			return nil
		},
		RunE: showHelp,
	}
	cmd.AddCommand(below...)
	return cmd
}

// showHelp tells a person what is below a command. That is no result, so who asked for one as JSON is told what is missing.
func showHelp(cmd *cobra.Command, _ []string) error {
	if asked, err := cmd.Flags().GetBool("json"); err == nil && asked {
		return &exitError{exitUsage, seeHelp(fmt.Errorf("%s takes a command", cmd.CommandPath()), cmd)}
	}
	return cmd.Help()
}

// withSession runs a command's work on an open database.
func (c *cli) withSession(work func(cmd *cobra.Command, args []string, s *session) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		s, err := c.session(cmd.Context())
		if err != nil {
			return err
		}
		defer s.close(cmd.Context())
		return work(cmd, args, s)
	}
}

// when shows a time to a person.
func when(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") }

// span shows milliseconds to a person.
func span(ms *int64) string {
	if ms == nil {
		return "…"
	}
	return (time.Duration(*ms) * time.Millisecond).String()
}

// seconds shows a number of seconds to a person.
func seconds(s float64) string {
	return (time.Duration(s) * time.Second).String()
}

// money shows US dollars.
func money(usd float64) string { return fmt.Sprintf("$%.4f", usd) }

// percent shows a share.
func percent(share float64) string { return fmt.Sprintf("%.0f %%", share*100) }
